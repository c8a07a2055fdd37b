"""The process that prepares samples once for all consumers of a node, and its workers."""
