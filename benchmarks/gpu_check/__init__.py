"""`make gpu-check`: one prepared run on any GPU, under eight minutes and without a network."""
