"""The functions of the commands and their reports, which ``ckpttool`` exports.

``reading`` and ``keeping`` have those of small commands; a command that writes a checkpoint has its own module.

A module imports what all of its functions need. What only one of them needs, that function imports: start-up takes half
of the time of a small command.
"""
