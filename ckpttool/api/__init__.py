"""One function for each command; ``ckpttool`` itself offers them all.

Each module imports what all of its functions need, and functions what only they do: half of the time that a small
command takes is starting up.
"""
