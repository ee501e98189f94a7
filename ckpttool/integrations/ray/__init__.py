"""Bridges to Ray: a run's storage and a cluster's workers."""
