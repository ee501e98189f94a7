"""The functions of the commands and their reports, which ``ckpttool`` exports.

``reading`` and ``keeping`` have the functions of small commands; a command that writes a checkpoint has its own module.

A module imports only packages that all of its functions need; a function imports others itself: start-up takes half of
the time of a small command.
"""
