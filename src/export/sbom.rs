//! Software bills of materials: CycloneDX 1.5/1.6 and SPDX 2.3, both as JSON. They are deterministic: no clock, serial numbers from the packages.

use std::collections::{BTreeMap, BTreeSet};

use rattler_conda_types::RepoDataRecord;
use serde_json::{Map, Value, json};

use super::{Exported, Options, Origin, PythonPackage, Subject, requirement_name};
use crate::install::{hex_text, sha256_hex};
use crate::prefix;

/// License identifiers of SPDX that packages commonly have. Others are given as free text, which is always valid.
const LICENSES: &[&str] = &[
    "0BSD",
    "AFL-2.1",
    "AFL-3.0",
    "AGPL-3.0-only",
    "AGPL-3.0-or-later",
    "Apache-1.1",
    "Apache-2.0",
    "Artistic-2.0",
    "BSD-1-Clause",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSD-3-Clause-Clear",
    "BSL-1.0",
    "CC-BY-4.0",
    "CC0-1.0",
    "CECILL-2.1",
    "CECILL-C",
    "EPL-1.0",
    "EPL-2.0",
    "FSFAP",
    "FTL",
    "GFDL-1.3-or-later",
    "GPL-1.0-or-later",
    "GPL-2.0-only",
    "GPL-2.0-or-later",
    "GPL-3.0-only",
    "GPL-3.0-or-later",
    "HPND",
    "ICU",
    "IJG",
    "ISC",
    "LGPL-2.0-only",
    "LGPL-2.0-or-later",
    "LGPL-2.1-only",
    "LGPL-2.1-or-later",
    "LGPL-3.0-only",
    "LGPL-3.0-or-later",
    "LicenseRef-NVIDIA-End-User-License-Agreement",
    "MIT",
    "MIT-0",
    "MIT-CMU",
    "MPL-1.1",
    "MPL-2.0",
    "NCSA",
    "OFL-1.1",
    "OLDAP-2.8",
    "OpenSSL",
    "PostgreSQL",
    "PSF-2.0",
    "Python-2.0",
    "Ruby",
    "SGI-B-2.0",
    "TCL",
    "Unicode-3.0",
    "Unicode-DFS-2016",
    "Unlicense",
    "UPL-1.0",
    "Vim",
    "W3C",
    "WTFPL",
    "X11",
    "X11-distribute-modifications-variant",
    "Zlib",
    "ZPL-2.1",
    "bzip2-1.0.6",
    "blessing",
    "curl",
    "libpng-2.0",
    "libtiff",
    "zlib-acknowledgement",
];
const EXCEPTIONS: &[&str] = &[
    "GCC-exception-3.1",
    "GCC-exception-2.0",
    "LLVM-exception",
    "Classpath-exception-2.0",
    "Bison-exception-2.2",
    "Autoconf-exception-3.0",
];

/// The text as an SPDX expression of known identifiers; `None` if it is something else.
fn expression(text: &str) -> Option<String> {
    let spaced = text.replace('(', " ( ").replace(')', " ) ");
    let mut words: Vec<String> = Vec::new();
    let (mut depth, mut operand_next, mut exception_next) = (0usize, true, false);
    for word in spaced.split_whitespace() {
        match word {
            "(" if operand_next && !exception_next => depth += 1,
            ")" if !operand_next && depth > 0 => depth -= 1,
            "AND" | "OR" | "and" | "or" if !operand_next => {
                operand_next = true;
                words.push(word.to_uppercase());
                continue;
            }
            "WITH" | "with" if !operand_next => {
                operand_next = true;
                exception_next = true;
                words.push("WITH".to_owned());
                continue;
            }
            _ if operand_next && exception_next && EXCEPTIONS.contains(&word) => {
                operand_next = false;
                exception_next = false;
            }
            _ if operand_next && !exception_next && LICENSES.contains(&word) && !word.starts_with("LicenseRef-") => operand_next = false,
            _ => return None,
        }
        words.push(word.to_owned());
    }
    (!operand_next && depth == 0).then(|| words.join(" ").replace("( ", "(").replace(" )", ")"))
}

/// Percent-encodes for a package URL.
fn encoded(text: &str) -> String {
    text.bytes().fold(String::new(), |mut out, byte| {
        if byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_' | b'~' | b':' | b'/') {
            out.push(byte as char);
        } else {
            out.push_str(&format!("%{byte:02X}"));
        }
        out
    })
}

/// `pkg:conda/NAME@VERSION?build=…&channel=…&subdir=…&type=…`.
pub fn conda_purl(record: &RepoDataRecord) -> String {
    let package = &record.package_record;
    let file = record.identifier.to_file_name();
    let kind = if file.ends_with(".tar.bz2") { "tar.bz2" } else { "conda" };
    format!(
        "pkg:conda/{}@{}?build={}&channel={}&subdir={}&type={kind}",
        encoded(package.name.as_normalized()),
        encoded(&package.version.to_string()),
        encoded(package.build.as_ref()),
        encoded(&prefix::channel_display(record)),
        encoded(&package.subdir),
    )
}

/// `pkg:pypi/NAME@VERSION`, with where it came from if that was no index.
pub fn pypi_purl(package: &PythonPackage) -> String {
    let base = format!("pkg:pypi/{}@{}", encoded(&package.name), encoded(&package.version));
    match &package.origin {
        Origin::Index { .. } | Origin::Directory { .. } => base,
        Origin::Vcs { vcs, url, commit, .. } => format!("{base}?vcs_url={}", encoded(&format!("{vcs}+{url}@{commit}"))),
        Origin::Archive { url, .. } => format!("{base}?download_url={}", encoded(url)),
    }
}

/// One package of the bill.
struct Item {
    purl: String,
    name: String,
    version: String,
    kind: &'static str,
    license: Option<String>,
    url: Option<String>,
    md5: Option<String>,
    sha256: Option<String>,
    needs: BTreeSet<String>,
}

fn items(subject: &Subject) -> Vec<Item> {
    let mut by_conda_name: BTreeMap<&str, String> = BTreeMap::new();
    let mut by_python_name: BTreeMap<String, String> = BTreeMap::new();
    for record in &subject.conda {
        let name = record.package_record.name.as_normalized();
        by_conda_name.insert(name, conda_purl(record));
        by_python_name.insert(prefix::normalize(name), conda_purl(record));
    }
    for package in &subject.python {
        by_python_name.insert(package.name.clone(), pypi_purl(package));
    }
    let mut items: Vec<Item> = subject
        .conda
        .iter()
        .map(|record| {
            let package = &record.package_record;
            let purl = conda_purl(record);
            let needs = package
                .depends
                .iter()
                .filter_map(|text| {
                    let name = text.split([' ', '=', '<', '>', '!', '~', '[']).next()?.rsplit("::").next()?.to_lowercase();
                    by_conda_name.get(name.as_str()).cloned()
                })
                .filter(|need| *need != purl)
                .collect();
            Item {
                name: package.name.as_normalized().to_owned(),
                version: package.version.to_string(),
                kind: "conda",
                license: package.license.clone(),
                url: prefix::known_url(record).filter(|url| url.scheme() != "file").map(|url| url.to_string()),
                md5: package.md5.as_ref().map(|hash| hex_text(hash)),
                sha256: package.sha256.as_ref().map(|hash| hex_text(hash)),
                needs,
                purl,
            }
        })
        .collect();
    items.extend(subject.python.iter().map(|package| {
        let purl = pypi_purl(package);
        let needs = package
            .requires
            .iter()
            // What an extra would add is not known to be wanted.
            .filter(|line| !line.split_once(';').is_some_and(|(_, marker)| marker.contains("extra")))
            .filter_map(|line| by_python_name.get(&requirement_name(line)?).cloned())
            .filter(|need| *need != purl)
            .collect();
        let (url, sha256) = match &package.origin {
            Origin::Index { url, sha256 } => (url.clone(), sha256.clone()),
            Origin::Archive { url, sha256, .. } => (Some(url.clone()), sha256.clone()),
            Origin::Vcs { vcs, url, commit, .. } => (Some(format!("{vcs}+{url}@{commit}")), None),
            Origin::Directory { .. } => (None, None),
        };
        Item {
            name: package.name.clone(),
            version: package.version.clone(),
            kind: "pypi",
            license: package.license.clone(),
            url: url.map(|url| super::without_credentials(&url)),
            md5: None,
            sha256: sha256.filter(|hash| hash.len() == 64),
            needs,
            purl,
        }
    }));
    items.sort_by(|a, b| a.purl.cmp(&b.purl));
    items.dedup_by(|a, b| a.purl == b.purl);
    items
}

/// A UUID (version 8 of RFC 9562) made from the packages, so that the same environment has the same one.
fn uuid(subject: &Subject, items: &[Item]) -> String {
    let mut text = crate::install::digest_of(&subject.conda);
    text.push_str(subject.name.as_deref().unwrap_or_default());
    for item in items {
        text.push_str(&format!("\n{} {}", item.purl, item.sha256.as_deref().unwrap_or_default()));
    }
    let digest = sha256_hex(text.as_bytes());
    let variant = match digest.as_bytes()[16] {
        b'0' | b'4' | b'8' | b'c' => '8',
        b'1' | b'5' | b'9' | b'd' => '9',
        b'2' | b'6' | b'a' | b'e' => 'a',
        _ => 'b',
    };
    format!("{}-{}-8{}-{variant}{}-{}", &digest[..8], &digest[8..12], &digest[13..16], &digest[17..20], &digest[20..32])
}

/// A time in seconds since 1970 as RFC 3339 in UTC.
fn time_text(seconds: i64) -> Option<String> {
    Some(jiff::Timestamp::from_second(seconds).ok()?.strftime("%Y-%m-%dT%H:%M:%SZ").to_string())
}

/// CycloneDX.
pub fn cyclonedx(subject: &Subject, options: &Options) -> Exported {
    let items = items(subject);
    let version = if options.cyclonedx_1_5 { "1.5" } else { "1.6" };
    let mut metadata = Map::new();
    if let Some(time) = options.source_date_epoch.and_then(time_text) {
        metadata.insert("timestamp".into(), json!(time));
    }
    metadata
        .insert("tools".into(), json!({ "components": [{ "type": "application", "name": "tare", "version": env!("CARGO_PKG_VERSION") }] }));
    let name = subject.name.as_deref().unwrap_or("environment");
    let mut properties = Vec::new();
    properties.extend(subject.platform.map(|platform| json!({ "name": "tare:platform", "value": platform.to_string() })));
    properties.extend(subject.virtual_packages.iter().map(|package| json!({ "name": "tare:virtual-package", "value": package })));
    let mut root = json!({ "type": "application", "bom-ref": "environment", "name": name });
    if !properties.is_empty() {
        root["properties"] = json!(properties);
    }
    metadata.insert("component".into(), root);
    let components: Vec<Value> = items
        .iter()
        .map(|item| {
            let mut component =
                json!({ "type": "library", "bom-ref": item.purl, "name": item.name, "version": item.version, "purl": item.purl });
            let mut hashes = Vec::new();
            hashes.extend(item.md5.as_ref().map(|hash| json!({ "alg": "MD5", "content": hash })));
            hashes.extend(item.sha256.as_ref().map(|hash| json!({ "alg": "SHA-256", "content": hash })));
            if !hashes.is_empty() {
                component["hashes"] = json!(hashes);
            }
            if let Some(license) = item.license.as_ref().filter(|text| !text.trim().is_empty()) {
                component["licenses"] = match expression(license) {
                    Some(expression) if expression.contains(' ') => json!([{ "expression": expression }]),
                    Some(id) => json!([{ "license": { "id": id } }]),
                    None => json!([{ "license": { "name": license } }]),
                };
            }
            if let Some(url) = &item.url {
                let kind = if url.contains("+") && url.split_once("://").is_some_and(|(scheme, _)| scheme.contains('+')) {
                    "vcs"
                } else {
                    "distribution"
                };
                component["externalReferences"] = json!([{ "type": kind, "url": url }]);
            }
            component["properties"] = json!([{ "name": "tare:kind", "value": item.kind }]);
            component
        })
        .collect();
    let mut dependencies = vec![json!({ "ref": "environment", "dependsOn": items.iter().map(|item| &item.purl).collect::<Vec<_>>() })];
    dependencies.extend(items.iter().map(|item| {
        if item.needs.is_empty() { json!({ "ref": item.purl }) } else { json!({ "ref": item.purl, "dependsOn": item.needs }) }
    }));
    let document = json!({
        "$schema": format!("http://cyclonedx.org/schema/bom-{version}.schema.json"),
        "bomFormat": "CycloneDX",
        "specVersion": version,
        "serialNumber": format!("urn:uuid:{}", uuid(subject, &items)),
        "version": 1,
        "metadata": metadata,
        "components": components,
        "dependencies": dependencies,
    });
    Exported { text: format!("{document:#}\n"), notes: folder_notes(subject) }
}

fn folder_notes(subject: &Subject) -> Vec<String> {
    let folders: Vec<&str> = subject
        .python
        .iter()
        .filter(|package| matches!(package.origin, Origin::Directory { .. }))
        .map(|package| package.name.as_str())
        .collect();
    if folders.is_empty() {
        return Vec::new();
    }
    vec![format!("from folders of this machine, so the bill has names and versions only: {}", super::conda::names(folders.into_iter()))]
}

/// An identifier that SPDX allows: letters, digits, `.` and `-`.
fn spdx_id(text: &str) -> String {
    text.chars().map(|c| if c.is_ascii_alphanumeric() || c == '.' || c == '-' { c } else { '-' }).collect()
}

/// SPDX. Its `created` is mandatory: SOURCE_DATE_EPOCH, else the time of the newest package, else 1970.
pub fn spdx(subject: &Subject, options: &Options) -> Exported {
    let items = items(subject);
    let name = subject.name.as_deref().unwrap_or("environment");
    let newest =
        subject.conda.iter().filter_map(|record| record.package_record.timestamp.as_ref()).map(|time| time.timestamp_millis() / 1000).max();
    let created = options.source_date_epoch.or(newest).and_then(time_text).unwrap_or_else(|| "1970-01-01T00:00:00Z".to_owned());
    let mut ids: BTreeMap<&str, String> = BTreeMap::new();
    let mut used: BTreeSet<String> = BTreeSet::new();
    for item in &items {
        let base = format!("SPDXRef-{}-{}-{}", item.kind, spdx_id(&item.name), spdx_id(&item.version));
        let mut id = base.clone();
        let mut number = 2;
        while !used.insert(id.clone()) {
            id = format!("{base}-{number}");
            number += 1;
        }
        ids.insert(&item.purl, id);
    }
    let mut texts: BTreeMap<String, String> = BTreeMap::new();
    let mut license_of = |text: &Option<String>| -> String {
        let Some(text) = text.as_ref().filter(|text| !text.trim().is_empty()) else { return "NOASSERTION".to_owned() };
        expression(text).unwrap_or_else(|| {
            let base = format!("LicenseRef-{}", spdx_id(text.trim_start_matches("LicenseRef-")));
            let mut id = base.clone();
            let mut number = 2;
            while texts.get(&id).is_some_and(|other| other != text) {
                id = format!("{base}-{number}");
                number += 1;
            }
            texts.insert(id.clone(), text.clone());
            id
        })
    };
    let mut packages = vec![json!({
        "SPDXID": "SPDXRef-Environment",
        "name": name,
        "downloadLocation": "NOASSERTION",
        "filesAnalyzed": false,
        "licenseConcluded": "NOASSERTION",
        "licenseDeclared": "NOASSERTION",
        "copyrightText": "NOASSERTION",
    })];
    let mut relationships =
        vec![json!({ "spdxElementId": "SPDXRef-DOCUMENT", "relationshipType": "DESCRIBES", "relatedSpdxElement": "SPDXRef-Environment" })];
    for item in &items {
        let id = &ids[item.purl.as_str()];
        let mut checksums = Vec::new();
        checksums.extend(item.md5.as_ref().map(|hash| json!({ "algorithm": "MD5", "checksumValue": hash })));
        checksums.extend(item.sha256.as_ref().map(|hash| json!({ "algorithm": "SHA256", "checksumValue": hash })));
        let mut package = json!({
            "SPDXID": id,
            "name": item.name,
            "versionInfo": item.version,
            "downloadLocation": item.url.as_deref().unwrap_or("NOASSERTION"),
            "filesAnalyzed": false,
            "licenseConcluded": "NOASSERTION",
            "licenseDeclared": license_of(&item.license),
            "copyrightText": "NOASSERTION",
            "externalRefs": [{ "referenceCategory": "PACKAGE-MANAGER", "referenceType": "purl", "referenceLocator": item.purl }],
        });
        if !checksums.is_empty() {
            package["checksums"] = json!(checksums);
        }
        packages.push(package);
        relationships.push(json!({ "spdxElementId": "SPDXRef-Environment", "relationshipType": "CONTAINS", "relatedSpdxElement": id }));
        for need in &item.needs {
            if let Some(other) = ids.get(need.as_str()) {
                relationships.push(json!({ "spdxElementId": id, "relationshipType": "DEPENDS_ON", "relatedSpdxElement": other }));
            }
        }
    }
    let mut document = json!({
        "spdxVersion": "SPDX-2.3",
        "dataLicense": "CC0-1.0",
        "SPDXID": "SPDXRef-DOCUMENT",
        "name": name,
        "documentNamespace": format!("https://spdx.org/spdxdocs/{}-{}", spdx_id(name), uuid(subject, &items)),
        "creationInfo": { "created": created, "creators": [format!("Tool: tare-{}", env!("CARGO_PKG_VERSION"))] },
        "packages": packages,
        "relationships": relationships,
    });
    if !texts.is_empty() {
        let infos: Vec<Value> = texts.iter().map(|(id, text)| json!({ "licenseId": id, "extractedText": text, "name": text })).collect();
        document["hasExtractedLicensingInfos"] = json!(infos);
    }
    Exported { text: format!("{document:#}\n"), notes: folder_notes(subject) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_expressions_of_known_licenses_are_expressions() {
        assert_eq!(expression("MIT").as_deref(), Some("MIT"));
        assert_eq!(expression("(MIT or Apache-2.0) AND ISC").as_deref(), Some("(MIT OR Apache-2.0) AND ISC"));
        assert_eq!(expression("GPL-3.0-only WITH GCC-exception-3.1").as_deref(), Some("GPL-3.0-only WITH GCC-exception-3.1"));
        for text in ["", "BSD License", "MIT OR", "MIT )", "(MIT", "MIT ISC", "MIT WITH MIT", "LGPL"] {
            assert_eq!(expression(text), None, "{text}");
        }
    }

    #[test]
    fn purls_are_encoded() {
        let package = PythonPackage {
            name: "x".into(),
            version: "1.0+cu126".into(),
            origin: Origin::Vcs {
                vcs: "git".into(),
                url: "https://h/x.git".into(),
                commit: "ab".into(),
                subdirectory: None,
                editable: false,
            },
            requires: Vec::new(),
            license: None,
            requested: false,
            record: None,
        };
        assert_eq!(pypi_purl(&package), "pkg:pypi/x@1.0%2Bcu126?vcs_url=git%2Bhttps://h/x.git%40ab");
    }
}
