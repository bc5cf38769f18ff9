"""The settings of each method, one file each, with their limits and help texts."""

from pseudoloss.config.methods.base import MethodSettings
from pseudoloss.config.methods.ce import CESettings
from pseudoloss.config.methods.co_teaching import CoTeachingSettings
from pseudoloss.config.methods.detection import DetectionSettings
from pseudoloss.config.methods.divide_mix import DivideMixSettings
from pseudoloss.config.methods.dsos import DSOSSettings
from pseudoloss.config.methods.dynamic_bootstrapping import DynamicBootstrappingSettings
from pseudoloss.config.methods.elr import ELRSettings
from pseudoloss.config.methods.elr_plus import ELRPlusSettings
from pseudoloss.config.methods.evidential_mix import EvidentialMixSettings
from pseudoloss.config.methods.jo_src import JoSRCSettings
from pseudoloss.config.methods.mixmatch import MixMatchSettings
from pseudoloss.config.methods.mixup import MixupSettings
from pseudoloss.config.methods.pls import PLSSettings
from pseudoloss.config.methods.pls_plus import PLSPlusSettings
from pseudoloss.config.methods.rrl import RRLSettings

__all__ = [
    "METHOD_SETTINGS",
    "CESettings",
    "CoTeachingSettings",
    "DSOSSettings",
    "DetectionSettings",
    "DivideMixSettings",
    "DynamicBootstrappingSettings",
    "ELRPlusSettings",
    "ELRSettings",
    "EvidentialMixSettings",
    "JoSRCSettings",
    "MethodSettings",
    "MixMatchSettings",
    "MixupSettings",
    "PLSPlusSettings",
    "PLSSettings",
    "RRLSettings",
]

METHOD_SETTINGS: dict[str, type[MethodSettings]] = {
    "pls": PLSSettings,
    "pls-plus": PLSPlusSettings,
    "ce": CESettings,
    "mixup": MixupSettings,
    "elr": ELRSettings,
    "elr-plus": ELRPlusSettings,
    "co-teaching": CoTeachingSettings,
    "divide-mix": DivideMixSettings,
    "dynamic-bootstrapping": DynamicBootstrappingSettings,
    "dsos": DSOSSettings,
    "rrl": RRLSettings,
    "evidential-mix": EvidentialMixSettings,
    "jo-src": JoSRCSettings,
}
"""The settings of each method, by its name; docs/add-a-method.md says how to add one."""
