"""What a process finds: memory and cores that it may use, settings of libraries."""
