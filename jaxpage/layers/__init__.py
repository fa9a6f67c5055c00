"""The pieces a decoder is made of: pure functions of arrays. They know nothing about requests or blocks' owners."""
