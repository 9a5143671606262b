"""The heart: units, channels, objectives, replay and buffers, as pure functions.

An RL objective over a mini-batch is a function of a few scalars per candidate. Its gradient over
the adapter is therefore a weighted sum of the gradients of those scalars, and the weights can be
applied after the gradients were taken. Everything in this package follows from that.
"""
