"""Test storages: conformance tests, and fault injection for disks and S3 servers.

* ``storage.StorageTests``: conformance tests of ``WritableStorage``; subclass it in a test module.
* ``disks``: records all disk operations of all ranks, kills a rank or fails an operation, and builds every state that a
  power failure may leave.
* ``failing_calls``: fails or interrupts the n-th system call of a command.
* ``s3_proxy``: a proxy in front of an S3 server that delays, cuts and answers requests.
"""
