"""What adapters share: records and documents, messages and responses, ids, names."""
