"""Every setting with its default: those that all methods share (settings.py), and those of each
method (methods/).

No default lives anywhere else; presets/ holds named sets of them. Importing this package costs
nothing: the command line reads it before torch is loaded. "Row n" is a row of the table in
docs/paper-and-code.md.
"""

from pseudoloss.config.methods import (
    METHOD_SETTINGS,
    CESettings,
    CoTeachingSettings,
    DetectionSettings,
    DivideMixSettings,
    DSOSSettings,
    DynamicBootstrappingSettings,
    ELRSettings,
    JoSRCSettings,
    MixupSettings,
    PLSPlusSettings,
    PLSSettings,
)
from pseudoloss.config.settings import (
    EMBEDDED,
    EMBEDDED_NETWORK,
    OWN,
    WARMUP_SHARE,
    Settings,
    all_setting_types,
    as_flag,
    as_json,
    as_text,
    describe_settings,
    flag,
    parse_schedule,
    scaled_schedule,
    setting_types,
    shorten,
    unknown_setting,
    upgrade_settings,
)

__all__ = [
    "EMBEDDED",
    "EMBEDDED_NETWORK",
    "METHOD_SETTINGS",
    "OWN",
    "WARMUP_SHARE",
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
    "Settings",
    "all_setting_types",
    "as_flag",
    "as_json",
    "as_text",
    "describe_settings",
    "flag",
    "parse_schedule",
    "scaled_schedule",
    "setting_types",
    "shorten",
    "unknown_setting",
    "upgrade_settings",
]
