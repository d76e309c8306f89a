//! Small channels made on the spot: real archives and the repodata that describes them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use rattler_conda_types::compression_level::CompressionLevel;
use rattler_package_streaming::write::{write_conda_package, write_tar_bz2_package};
use serde_json::{Value, json};
use sha2::Digest;

/// What a package is made of.
#[derive(Clone, Debug)]
pub struct Package {
    name: String,
    version: String,
    build: String,
    subdir: String,
    index: serde_json::Map<String, Value>,
    files: BTreeMap<String, File>,
    link: Option<Value>,
    tar_bz2: bool,
}

#[derive(Clone, Debug)]
struct File {
    contents: Vec<u8>,
    executable: bool,
    link_to: Option<String>,
    placeholder: Option<(String, &'static str)>,
}

/// The prefix that the files of test packages were "built" for.
pub const PLACEHOLDER: &str =
    "/opt/placeholder_placeholder_placeholder_placeholder_placeholder_placeholder_placeholder_placeholder_placeholder_placeholder_end";

impl Package {
    pub fn new(name: &str, version: &str) -> Self {
        Package {
            name: name.into(),
            version: version.into(),
            build: "0".into(),
            subdir: "linux-64".into(),
            index: serde_json::Map::new(),
            files: BTreeMap::new(),
            link: None,
            tar_bz2: false,
        }
    }
    pub fn build(mut self, build: &str) -> Self {
        self.build = build.into();
        self
    }
    pub fn subdir(mut self, subdir: &str) -> Self {
        self.subdir = subdir.into();
        self
    }
    pub fn depends(self, depends: &[&str]) -> Self {
        self.key("depends", json!(depends))
    }
    /// Any key of index.json.
    pub fn key(mut self, key: &str, value: Value) -> Self {
        self.index.insert(key.into(), value);
        self
    }
    pub fn noarch_python(mut self, entry_points: &[&str]) -> Self {
        self.subdir = "noarch".into();
        self.link = Some(json!({ "noarch": { "type": "python", "entry_points": entry_points }, "package_metadata_version": 1 }));
        self.key("noarch", json!("python"))
    }
    pub fn tar_bz2(mut self) -> Self {
        self.tar_bz2 = true;
        self
    }
    pub fn file(mut self, path: &str, contents: impl AsRef<[u8]>) -> Self {
        self.files.insert(
            path.into(),
            File { contents: contents.as_ref().to_vec(), executable: path.starts_with("bin/"), link_to: None, placeholder: None },
        );
        self
    }
    /// A text file in which `{PREFIX}` becomes the prefix of the environment.
    pub fn prefixed(mut self, path: &str, contents: &str) -> Self {
        let contents = contents.replace("{PREFIX}", PLACEHOLDER).into_bytes();
        self.files.insert(
            path.into(),
            File { contents, executable: path.starts_with("bin/"), link_to: None, placeholder: Some((PLACEHOLDER.into(), "text")) },
        );
        self
    }
    pub fn symlink(mut self, path: &str, target: &str) -> Self {
        self.files.insert(path.into(), File { contents: vec![], executable: false, link_to: Some(target.into()), placeholder: None });
        self
    }

    fn stem(&self) -> String {
        format!("{}-{}-{}", self.name, self.version, self.build)
    }
}

/// A channel in a folder.
pub struct Channel {
    root: PathBuf,
    packages: BTreeMap<String, BTreeMap<String, Value>>,
}

impl Channel {
    pub fn new(root: impl Into<PathBuf>) -> Self {
        let root = root.into();
        let mut channel = Channel { root, packages: BTreeMap::new() };
        for subdir in ["linux-64", "noarch"] {
            channel.packages.entry(subdir.into()).or_default();
        }
        channel.write_repodata();
        channel
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    pub fn url(&self) -> String {
        format!("file://{}", self.root.display())
    }

    /// Packs `package` and lists it in the repodata. Returns the path of the archive.
    pub fn add(&mut self, package: &Package) -> PathBuf {
        let subdir = self.root.join(&package.subdir);
        std::fs::create_dir_all(&subdir).expect("a folder");
        let name = format!("{}.{}", package.stem(), if package.tar_bz2 { "tar.bz2" } else { "conda" });
        let archive = subdir.join(&name);
        let index = pack(package, &archive);
        let bytes = std::fs::read(&archive).expect("an archive");
        let mut record = index.as_object().cloned().expect("an object");
        record.insert("size".into(), json!(bytes.len()));
        record.insert("sha256".into(), json!(hex(&sha2::Sha256::digest(&bytes))));
        record.insert("md5".into(), json!(hex(&rattler_digest::compute_bytes_digest::<rattler_digest::Md5>(&bytes))));
        self.packages.entry(package.subdir.clone()).or_default().insert(name, Value::Object(record));
        self.write_repodata();
        archive
    }

    fn write_repodata(&mut self) {
        for (subdir, packages) in &self.packages {
            let (conda, tar_bz2): (BTreeMap<_, _>, BTreeMap<_, _>) = packages.iter().partition(|(name, _)| name.ends_with(".conda"));
            let repodata =
                json!({ "info": { "subdir": subdir }, "packages": tar_bz2, "packages.conda": conda, "removed": [], "repodata_version": 1 });
            let folder = self.root.join(subdir);
            std::fs::create_dir_all(&folder).expect("a folder");
            std::fs::write(folder.join("repodata.json"), repodata.to_string()).expect("repodata");
        }
    }
}

/// Writes the archive; returns index.json.
pub fn pack(package: &Package, archive: &Path) -> Value {
    let folder = tempfile::tempdir().expect("a folder");
    let mut paths = Vec::new();
    let mut entries = Vec::new();
    for (name, file) in &package.files {
        let path = folder.path().join(name);
        std::fs::create_dir_all(path.parent().expect("a parent")).expect("a folder");
        let mut entry = json!({ "_path": name, "path_type": if file.link_to.is_some() { "softlink" } else { "hardlink" } });
        if let Some(target) = &file.link_to {
            std::os::unix::fs::symlink(target, &path).expect("a link");
            entry["sha256"] = json!(hex(&sha2::Sha256::digest(b"")));
            entry["size_in_bytes"] = json!(0);
        } else {
            std::fs::write(&path, &file.contents).expect("a file");
            use std::os::unix::fs::PermissionsExt;
            let mode = if file.executable { 0o755 } else { 0o644 };
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).expect("a mode");
            entry["sha256"] = json!(hex(&sha2::Sha256::digest(&file.contents)));
            entry["size_in_bytes"] = json!(file.contents.len());
        }
        if let Some((placeholder, mode)) = &file.placeholder {
            entry["prefix_placeholder"] = json!(placeholder);
            entry["file_mode"] = json!(mode);
        }
        entries.push(entry);
        paths.push(path);
    }
    let mut index = package.index.clone();
    index.insert("name".into(), json!(package.name));
    index.insert("version".into(), json!(package.version));
    index.insert("build".into(), json!(package.build));
    let number = package.build.rsplit('_').next().and_then(|last| last.parse::<u64>().ok()).unwrap_or(0);
    index.entry("build_number").or_insert(json!(number));
    index.insert("subdir".into(), json!(package.subdir));
    index.entry("depends").or_insert(json!([]));
    index.entry("constrains").or_insert(json!([]));
    let info = folder.path().join("info");
    std::fs::create_dir_all(&info).expect("a folder");
    let mut write = |name: &str, value: String| {
        std::fs::write(info.join(name), value).expect("a file");
        paths.push(info.join(name));
    };
    write("index.json", Value::Object(index.clone()).to_string());
    write("paths.json", json!({ "paths": entries, "paths_version": 1 }).to_string());
    if let Some(link) = &package.link {
        write("link.json", link.to_string());
    }
    let out = std::fs::File::create(archive).expect("an archive");
    let timestamp = "2024-01-01T00:00:00Z".parse().expect("a time");
    if package.tar_bz2 {
        write_tar_bz2_package(out, folder.path(), &paths, CompressionLevel::Lowest, Some(&timestamp), None).expect("a package");
    } else {
        write_conda_package(out, folder.path(), &paths, CompressionLevel::Lowest, None, &package.stem(), Some(&timestamp), None)
            .expect("a package");
    }
    Value::Object(index)
}

pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
