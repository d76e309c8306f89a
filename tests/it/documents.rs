//! The files and scripts of docs/ci.md and docs/onboarding.md do what they say.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_yaml::Value;

use crate::common::channel::{Channel, Package};
use crate::common::{Ran, TestEnv};

fn document(name: &str) -> String {
    std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs").join(name)).unwrap()
}

/// The blocks of a language, each with the line before it.
fn blocks(text: &str, language: &str) -> Vec<(String, String)> {
    let mut found = Vec::new();
    let mut title = String::new();
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        if line == format!("```{language}") {
            let body: Vec<&str> = lines.by_ref().take_while(|line| *line != "```").collect();
            found.push((title.clone(), body.join("\n") + "\n"));
        } else if !line.trim().is_empty() {
            title = line.to_owned();
        }
    }
    found
}

fn yaml(title: &str) -> Value {
    let text = document("ci.md");
    let (_, body) = blocks(&text, "yaml").into_iter().find(|(before, _)| before.contains(title)).unwrap_or_else(|| panic!("no {title}"));
    serde_yaml::from_str(&body).unwrap_or_else(|error| panic!("{title}: {error}"))
}

fn program(path: &Path, text: &str) {
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(path, text).unwrap();
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
}

/// A project with a lock, a repository with a branch to compare with, and programs that stand for those outside.
struct Project {
    env: TestEnv,
    channel: Channel,
}

/// An interpreter that runs nothing and answers what `check` asks of it.
const PYTHON: &str = r#"#!/bin/sh
[ "$1" = -m ] && exit 0
echo '{"version": "3.11.0", "implementation": "cpython", "executable": "{PREFIX}/bin/python", "prefix": "{PREFIX}", "base_prefix": "{PREFIX}",
 "path": [], "sites": [], "user_site": null, "user_site_enabled": false, "user_site_exists": false, "sitecustomize": null, "usercustomize": null,
 "pth": [], "loaded": 0, "torch": null, "torch_loaded": false}' | tr -d '\n'
"#;

impl Project {
    fn new() -> Option<Self> {
        let env = TestEnv::new();
        let mut channel = Channel::new(env.path().join("channel"));
        channel.add(&Package::new("python", "3.11.0").prefixed("bin/python", PYTHON));
        channel.add(&Package::new("lib", "1.0").file("share/lib", "one"));
        channel.add(&Package::new("lib", "2.0").file("share/lib", "two"));
        let bin = env.path().join("bin");
        let tare = env!("CARGO_BIN_EXE_tare");
        program(&bin.join("tare"), &format!("#!/bin/sh\nexec {tare} \"$@\"\n"));
        program(&bin.join("gh"), "#!/bin/sh\necho \"$@\" > gh.log\n");
        let project = Project { env, channel };
        project.request("lib=1.0");
        project.run("tare lock -q -f environment.yml", &[]).ok();
        let git = project.run(
            "git init -q -b main . && git config user.email a@b && git config user.name a && git add . && git commit -q -m a && \
             git update-ref refs/remotes/origin/main HEAD && git remote add origin \"$PWD\"",
            &[],
        );
        if git.code != 0 {
            eprintln!("skipped: no git ({})", git.stderr.trim());
            return None;
        }
        project.request("lib=2.0");
        project.run("tare lock -q -f environment.yml", &[]).ok();
        Some(project)
    }

    fn request(&self, lib: &str) {
        let text = format!("name: demo\nchannels: ['{}', nodefaults]\ndependencies: [python, {lib}]\n", self.channel.url());
        self.env.write("environment.yml", text);
    }

    /// Runs a script as a runner does: it stops at the first failure.
    fn run(&self, script: &str, variables: &[(&str, &str)]) -> Ran {
        let template = self.env.command(&[]);
        let mut shell = Command::new("sh");
        shell.args(["-e", "-c", script]).current_dir(self.env.work()).env_clear();
        for (name, value) in template.get_envs() {
            if let Some(value) = value {
                shell.env(name, value);
            }
        }
        let path = std::env::var_os("PATH").unwrap_or_default();
        let bin = self.env.path().join("bin");
        let all = std::iter::once(bin).chain(std::env::split_paths(&path));
        shell.env("PATH", std::env::join_paths(all).unwrap());
        shell.envs(variables.iter().copied());
        self.env.ran(shell.output().unwrap())
    }

    fn file(&self, name: &str) -> PathBuf {
        self.env.work().join(name)
    }
}

#[test]
fn the_workflow_of_github_runs() {
    let Some(project) = Project::new() else { return };
    let workflow = yaml(".github/workflows/environment.yml");
    let steps = workflow["jobs"]["environment"]["steps"].as_sequence().unwrap().clone();
    let summary = project.file("summary.md");
    let variables =
        [("GITHUB_ACTIONS", "true"), ("GITHUB_BASE_REF", "main"), ("GITHUB_STEP_SUMMARY", summary.to_str().unwrap()), ("NUMBER", "7")];
    let mut ran = 0;
    for step in &steps {
        let Some(script) = step["run"].as_str() else {
            assert!(step["uses"].as_str().is_some_and(|uses| uses.contains('@')), "{step:?}");
            continue;
        };
        // The one step that a user fills in.
        if step["name"] == "Get tare" {
            continue;
        }
        let out = project.run(script, &variables);
        assert_eq!(out.code, 0, "{script}\n{}\n{}", out.stdout, out.stderr);
        assert!(!out.stderr.contains("::error"), "{}", out.stderr);
        ran += 1;
    }
    assert_eq!(ran, 7);
    let summary = std::fs::read_to_string(&summary).unwrap();
    assert!(summary.contains("| ~ | lib | 1.0 "), "{summary}");
    assert!(std::fs::read_to_string(project.file("gh.log")).unwrap().starts_with("pr comment 7 --body-file diff.md"));
    assert!(project.file("check.xml").exists());
    let key = steps.iter().find(|step| step["uses"].as_str().is_some_and(|uses| uses.starts_with("actions/cache"))).unwrap();
    assert!(key["with"]["key"].as_str().unwrap().contains("hashFiles('tare.lock')"), "{key:?}");

    // The pull request that first adds the lock: the branch it is for has none.
    let empty = "git update-ref refs/remotes/origin/empty $(git commit-tree -m empty $(git mktree < /dev/null))";
    assert_eq!(project.run(empty, &[]).code, 0);
    let difference = steps.iter().find(|step| step["name"] == "What the change does").unwrap()["run"].as_str().unwrap();
    let first = project.run(difference, &[variables[0], ("GITHUB_BASE_REF", "empty"), variables[2]]);
    assert_eq!(first.code, 0, "{}", first.stderr);
    assert_eq!(std::fs::read_to_string(project.file("diff.md")).unwrap(), "tare.lock is new.\n");

    // What fails shows beside its line, and the step fails.
    let step = |name: &str| steps.iter().find(|step| step["name"] == name).unwrap()["run"].as_str().unwrap();
    project.request("lib=3.0");
    let out = project.run(step("The lock satisfies the file"), &variables).expect_code(4);
    out.stderr_has(
        "::error file=environment.yml,line=3,col=24,title=tare::the lock `tare.lock` is out of date: `lib=3.0` is not satisfied",
    );
    std::fs::write(project.env.envs().join("ci/share/lib"), "other").unwrap();
    let out = project.run(step("Every file is as installed"), &variables).expect_code(5);
    out.stderr_has("::error title=tare::").stderr_has("changed  share/lib");
    // Elsewhere nothing of this is written.
    let out = project.run(step("Every file is as installed"), &[]).expect_code(5);
    assert!(!out.stderr.contains("::error"), "{}", out.stderr);
}

#[test]
fn the_pipeline_of_gitlab_runs() {
    let Some(project) = Project::new() else { return };
    let pipeline = yaml(".gitlab-ci.yml");
    let root = project.env.work();
    let at = |name: &str| pipeline["variables"][name].as_str().unwrap().replace("$CI_PROJECT_DIR", root.to_str().unwrap());
    let (cache, envs) = (at("TARE_CACHE_DIR"), at("TARE_ROOT"));
    let variables = [("TARE_CACHE_DIR", cache.as_str()), ("TARE_ROOT", envs.as_str()), ("CI_MERGE_REQUEST_TARGET_BRANCH_NAME", "main")];
    for job in ["lock", "lock-diff", "environment"] {
        assert_eq!(pipeline[job]["extends"], ".tare");
        for line in pipeline[".tare"]["before_script"].as_sequence().unwrap().iter().chain(pipeline[job]["script"].as_sequence().unwrap()) {
            let out = project.run(line.as_str().unwrap(), &variables);
            assert_eq!(out.code, 0, "{line:?}\n{}\n{}", out.stdout, out.stderr);
        }
    }
    assert!(std::fs::read_to_string(project.file("diff.md")).unwrap().contains("| ~ | lib |"));
    assert!(project.file(".tare/envs/ci/conda-meta").is_dir() && project.file(".cache/tare").is_dir());
}

#[test]
fn the_hooks_of_pre_commit_run() {
    let Some(project) = Project::new() else { return };
    let local = yaml(".pre-commit-config.yaml");
    let hooks: Value =
        serde_yaml::from_str(&std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(".pre-commit-hooks.yaml")).unwrap())
            .unwrap();
    let command = |hook: &Value| {
        let args = hook["args"].as_sequence().into_iter().flatten().map(|word| word.as_str().unwrap());
        std::iter::once(hook["entry"].as_str().unwrap()).chain(args).collect::<Vec<_>>().join(" ")
    };
    let check = hooks.as_sequence().unwrap().iter().find(|hook| hook["id"] == "tare-lock-check").unwrap();
    let make = hooks.as_sequence().unwrap().iter().find(|hook| hook["id"] == "tare-lock").unwrap();
    let inline = &local["repos"][0]["hooks"][0];
    for hook in [check, inline] {
        assert_eq!((hook["pass_filenames"].as_bool(), hook["language"].as_str()), (Some(false), Some("system")));
        let files = regex::Regex::new(hook["files"].as_str().unwrap()).unwrap();
        assert!(files.is_match("environment.yml") && files.is_match("tare.lock") && !files.is_match("src/environment.yml.rs"));
        project.run(&command(hook), &[]).ok();
    }
    project.request("lib=1.0");
    for hook in [check, inline] {
        project.run(&command(hook), &[]).expect_code(4).stderr_has("`lib=1.0` is not satisfied");
    }
    project.run(&command(make), &[]).ok();
    project.run(&command(check), &[]).ok();
}

#[test]
fn the_scripts_run() {
    let Some(project) = Project::new() else { return };
    let scripts = blocks(&document("ci.md"), "sh");
    let script = |name: &str| {
        let body = scripts.iter().find(|(_, body)| body.contains(&format!("# {name}:"))).unwrap_or_else(|| panic!("no {name}"));
        program(&project.file(name), &body.1);
        format!("./{name}")
    };
    project.run(&script("ci.sh"), &[]).ok();
    project.run(&script("relock.sh"), &[]).ok().stdout_has("nothing to do");
    project.request("lib=1.0");
    project.run(&script("ci.sh"), &[]).expect_code(4);
    project.run(&script("relock.sh"), &[]).ok();
    project.run(&script("ci.sh"), &[]).ok();
}

#[test]
fn the_onboarding_script_decides_by_exit_codes() {
    let Some(project) = Project::new() else { return };
    let text = document("onboarding.md");
    let scripts = blocks(&text, "sh");
    program(&project.file("onboard.sh"), &scripts.iter().find(|(title, _)| title.contains("onboard.sh")).unwrap().1);
    let onboard = |variables: &[(&str, &str)]| project.run("./onboard.sh", variables);
    onboard(&[]).ok().stdout_has("ready: tare run -n demo python");
    onboard(&[]).ok().stderr_has("nothing to do");
    // Damage is repaired on the way.
    let prefix = project.env.envs().join("demo");
    std::fs::write(prefix.join("share/lib"), "other").unwrap();
    onboard(&[]).ok();
    assert_eq!(std::fs::read_to_string(prefix.join("share/lib")).unwrap(), "two");
    std::fs::write(prefix.join("bin/extra"), "#!/bin/sh\n").unwrap();
    onboard(&[]).expect_code(5);
    std::fs::remove_file(prefix.join("bin/extra")).unwrap();
    project.request("lib=1.0");
    onboard(&[]).expect_code(4).stderr_has("ask whoever changed it");
    std::fs::remove_file(project.file("environment.yml")).unwrap();
    onboard(&[]).expect_code(2);
    project.request("lib=2.0");
    // Not in the cache and not to be had.
    std::fs::remove_dir_all(&prefix).unwrap();
    std::fs::remove_dir_all(project.env.cache()).unwrap();
    std::fs::create_dir(project.env.cache()).unwrap();
    for entry in std::fs::read_dir(project.channel.root().join("linux-64")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "conda") {
            std::fs::remove_file(path).unwrap();
        }
    }
    onboard(&[]).expect_code(1).stderr_has("does not exist");
    let without = scripts.iter().find(|(_, body)| body.starts_with("tare create -f")).unwrap();
    assert!(without.1.contains("tare check -n demo"));
}
