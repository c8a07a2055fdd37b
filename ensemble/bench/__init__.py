"""Studies that anyone can run on their own machine: `ensemble bench NAME`."""
