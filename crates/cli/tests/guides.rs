//! What the guides tell people to paste: every configuration in them is one that the router takes.

#![allow(clippy::expect_used, reason = "it is all test")]

mod command;

use std::path::Path;

use command::run;

/// The blocks of a page that are whole configurations.
fn configurations(page: &str) -> Vec<String> {
    let blocks = page.split("```yaml\n").skip(1).filter_map(|rest| rest.split("```").next());
    let whole = blocks.filter(|block| block.lines().any(|line| line == "models:"));
    whole.map(str::to_owned).collect()
}

#[test]
fn every_configuration_in_the_guides_is_taken() {
    let guides = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/guides");
    let dir = tempfile::tempdir().expect("a directory for configurations");
    let mut checked = Vec::new();
    for entry in std::fs::read_dir(&guides).expect("the guides") {
        let path = entry.expect("a guide").path();
        let page = std::fs::read_to_string(&path).expect("a page");
        let name = path.file_stem().expect("a name").to_string_lossy().into_owned();
        for (at, text) in configurations(&page).into_iter().enumerate() {
            let file = dir.path().join(format!("{name}-{at}.yaml"));
            std::fs::write(&file, text).expect("a file");
            let file = file.to_string_lossy();
            let ended = run(&["check", "--offline", "-c", &file], &[], "");
            assert_eq!(ended.code, Some(0), "{name}: {ended:?}");
            checked.push(name.clone());
        }
    }
    for engine in ["vllm", "sglang", "tensorrt-llm"] {
        assert!(checked.iter().any(|name| name == engine), "{engine} among {checked:?}");
    }
}
