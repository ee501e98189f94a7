"""One module for each command, with its function and its report; ``ckpttool`` exports the functions.

A module imports what all of its functions need. What only one of them needs, that function imports: start-up takes half
of the time of a small command.
"""
