"""Test storages: conformance tests, and fault injection for disks and S3 servers.

* ``storage.StorageTests``: conformance tests of ``WritableStorage``; subclass it in a test module.
* ``faults.Rule``: names the calls to fail and the fault; ``disks`` and ``s3_proxy`` take the same rules.
* ``disks``: applies rules to the system calls of a command or of several ranks, and records these.
* ``s3_proxy``: a proxy in front of an S3 server that applies rules to requests; ``s3_faults`` has
  the faults of networks.
* ``power_failure``: builds every state of a disk that a power failure may leave.
"""
