"""The settings of each method, one file each, with their limits and help texts."""

from pseudoloss.config.methods.ce import CESettings
from pseudoloss.config.methods.co_teaching import CoTeachingSettings
from pseudoloss.config.methods.detection import DetectionSettings
from pseudoloss.config.methods.divide_mix import DivideMixSettings
from pseudoloss.config.methods.dsos import DSOSSettings
from pseudoloss.config.methods.dynamic_bootstrapping import DynamicBootstrappingSettings
from pseudoloss.config.methods.elr import ELRSettings
from pseudoloss.config.methods.jo_src import JoSRCSettings
from pseudoloss.config.methods.mixup import MixupSettings
from pseudoloss.config.methods.pls import PLSSettings
from pseudoloss.config.methods.pls_plus import PLSPlusSettings

__all__ = [
    "METHOD_SETTINGS",
    "CESettings",
    "CoTeachingSettings",
    "DSOSSettings",
    "DetectionSettings",
    "DivideMixSettings",
    "DynamicBootstrappingSettings",
    "ELRSettings",
    "JoSRCSettings",
    "MixupSettings",
    "PLSPlusSettings",
    "PLSSettings",
]

METHOD_SETTINGS: dict[str, type[DetectionSettings]] = {
    "pls": PLSSettings,
    "pls-plus": PLSPlusSettings,
    "ce": CESettings,
    "mixup": MixupSettings,
    "elr": ELRSettings,
    "co-teaching": CoTeachingSettings,
    "divide-mix": DivideMixSettings,
    "dynamic-bootstrapping": DynamicBootstrappingSettings,
    "dsos": DSOSSettings,
    "jo-src": JoSRCSettings,
}
"""The settings of each method, by its name; docs/add-a-method.md says how to add one."""
