"""A file for each study of `ensemble bench`: its options and what runs it; light imports only."""
