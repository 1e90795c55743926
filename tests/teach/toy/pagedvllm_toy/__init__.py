"""A small package whose definitions the tests of the live cells edit."""
