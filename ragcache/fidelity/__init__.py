"""How far an answer over composed states is from the one a full prefill gives: figures, and how they come about."""
