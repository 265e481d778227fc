"""The classes that stand for K3 in transformers' Auto classes. Imported by ``k3model.register()`` alone."""
