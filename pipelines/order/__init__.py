"""Which sample comes when: the order of epochs, the rows of ranks, the state of the shared stream."""
