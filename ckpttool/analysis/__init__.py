"""What a checkpoint holds: verified, compared, digested, extracted, described."""
