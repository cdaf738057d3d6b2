"""What one engine rank does with the weights it is sent, per protocol: decode, check as the real engine does, apply."""
