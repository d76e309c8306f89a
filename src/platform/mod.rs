//! Subdir and virtual packages of the machine the environment is for.

use rattler_conda_types::{GenericVirtualPackage, Subdir};

/// Where the value of a virtual package comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Provenance {
    /// Found on this machine.
    Detected,
    /// Given by a flag.
    Assumed,
    /// Given by a `CONDA_OVERRIDE_*` variable or a setting.
    Overridden,
    /// A default of the platform.
    Default,
}

/// A virtual package and where its value comes from.
#[derive(Debug, Clone)]
pub struct VirtualPackage {
    /// Name, version, build.
    pub package: GenericVirtualPackage,
    /// How it was obtained.
    pub provenance: Provenance,
    /// The route, flag or variable.
    pub source: String,
}

/// What was found out about the GPU.
#[derive(Debug, Clone, Default)]
pub struct GpuDetection {}

/// The machine the environment is for.
#[derive(Debug, Clone)]
pub struct Target {
    /// The subdir solved for.
    pub subdir: Subdir,
    /// Where the subdir comes from.
    pub subdir_source: String,
    /// Whether this machine can run it.
    pub is_native: bool,
    /// The virtual packages.
    pub virtual_packages: Vec<VirtualPackage>,
    /// GPU detection.
    pub gpu: GpuDetection,
    /// Remarks.
    pub remarks: Vec<String>,
}

/// What to do about the GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum GpuIntent {
    /// Take what there is.
    #[default]
    Auto,
    /// Refuse a CPU build.
    Require,
    /// No `__cuda`.
    None,
}

impl Target {
    /// All virtual packages.
    pub fn virtual_package_list(&self) -> Vec<GenericVirtualPackage> {
        self.virtual_packages.iter().map(|v| v.package.clone()).collect()
    }
    /// The `__cuda` virtual package.
    pub fn cuda(&self) -> Option<&VirtualPackage> {
        self.virtual_packages.iter().find(|v| v.package.name.as_normalized() == "__cuda")
    }
}
