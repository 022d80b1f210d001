"""Parameter servers: they hold parameters and optimizer states, hand out work, and update with the gradients that
workers push.
"""
