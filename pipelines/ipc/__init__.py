"""Between processes: how they are started, the messages that they send, the objects that they hand down."""
