"""Where arrays lie on several devices, and how a device gets those of which it holds a part."""
