"""Studies of the account of energy: whether its splits are fair and its figures true, and what metering costs."""
