"""Features beside the core, each in one folder with a row in ``ckpttool.registry``; none imports another."""
