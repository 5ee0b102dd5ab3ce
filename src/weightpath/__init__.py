"""weightpath: pick, make, prove and run the low-bit weights that suit a device."""
