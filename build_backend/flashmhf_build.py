"""PEP 517 backend: setuptools, plus the build requirements that only this machine can tell (torch, cmake, ninja)."""

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403  (the hooks that are not overridden below)
from toolchain import build_requirements


def get_requires_for_build_wheel(config_settings=None):
    return build_meta.get_requires_for_build_wheel(config_settings) + build_requirements()


def get_requires_for_build_editable(config_settings=None):
    return build_meta.get_requires_for_build_editable(config_settings) + build_requirements()
