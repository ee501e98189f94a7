"""The life of old checkpoints: thin them, pin them, and carry out what retention rules decide."""
