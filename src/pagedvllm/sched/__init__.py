"""The scheduler: who advances in a step, by how many tokens, and who must wait."""
