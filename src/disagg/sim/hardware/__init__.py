"""What a device can do: catalogues of accelerators, links and models, and how long a step takes on them."""
