"""Communication between the workers of one member; never between members."""
