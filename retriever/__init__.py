"""From a question to the chunks that may answer it: embeddings and a FAISS index."""
