"""Code shared by adapters: records and documents, messages and responses, ids, names."""
