"""Map the root folders into the edgeinfer namespace; everything else lives in pyproject.toml."""

from setuptools import find_packages, setup

ROOTS = {f"edgeinfer.{name}": name for name in ("export", "quant", "runtime", "apps")}
# The links edgeinfer/<name> serve editors and type checkers; the build must not depend on them.
links = [pattern for name in ROOTS.values() for pattern in (name, f"{name}.*")]
packages = ["edgeinfer", *(f"edgeinfer.{sub}" for sub in find_packages("edgeinfer", exclude=links))]
for dotted, folder in ROOTS.items():
    packages += [dotted, *(f"{dotted}.{sub}" for sub in find_packages(folder))]
setup(packages=packages, package_dir={"edgeinfer": "edgeinfer", **ROOTS})
