"""Tests and faults for implementers of storages: a conformance class, disks and S3 servers that fail.

* ``storage.StorageTests``: what every ``WritableStorage`` must do; subclass it in a test module.
* ``disks``: numbers all changes that ranks make on a disk, kills a rank or fails at one of them, and builds every state
  that a power failure may leave.
* ``failing_calls``: fails or interrupts the n-th system call of a command.
* ``s3_proxy``: a proxy before an S3 server that delays, cuts and answers requests.
"""
