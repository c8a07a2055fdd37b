"""The options of `ensemble bench`, one module for each study."""
