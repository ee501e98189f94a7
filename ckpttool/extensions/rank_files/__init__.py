"""The files of single ranks of FSDP2, as verl and Accelerate save and load them: a format and a target."""
