//! Annotations of GitHub Actions: workflow commands in the log of a step.

use std::path::Path;

use crate::error::Error;

/// Whether this runs in a step of GitHub Actions, which sets the variable to `true`.
pub fn is_on() -> bool {
    std::env::var("GITHUB_ACTIONS").is_ok_and(|value| value == "true")
}

/// The line for an error or warning (`level`), with a line feed. `workspace`: the checkout, which paths are relative to.
pub fn annotation(level: &str, error: &Error, workspace: Option<&Path>) -> String {
    let mut properties = Vec::new();
    if let Some(place) = error.places().first().filter(|place| !place.name.starts_with('<')) {
        let path = Path::new(&*place.name);
        let path = workspace.and_then(|workspace| path.strip_prefix(workspace).ok()).unwrap_or(path);
        let (line, column) = place.line_column();
        properties.push(format!("file={}", property(&path.display().to_string())));
        properties.push(format!("line={line}"));
        properties.push(format!("col={column}"));
    }
    properties.push("title=tare".to_owned());
    let mut message = error.message().to_owned();
    for cause in error.causes() {
        message.push_str(": ");
        message.push_str(cause);
    }
    for hint in error.hints() {
        message.push_str("\nhint: ");
        message.push_str(hint);
    }
    format!("::{level} {}::{}\n", properties.join(","), data(&message))
}

/// Escapes what ends or separates a command.
fn data(text: &str) -> String {
    text.replace('%', "%25").replace('\r', "%0D").replace('\n', "%0A")
}

fn property(text: &str) -> String {
    data(text).replace(':', "%3A").replace(',', "%2C")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Place;

    #[test]
    fn an_error_shows_beside_its_line() {
        let place =
            Place { name: "/checkout/envs/a,b.yml".into(), text: "name: x\nb: 100%\n".into(), offset: 11, len: 4, label: String::new() };
        let error = Error::usage("bad: 100%").because("two\nlines").hint("do it").at(place);
        assert_eq!(
            annotation("error", &error, Some(Path::new("/checkout"))),
            "::error file=envs/a%2Cb.yml,line=2,col=4,title=tare::bad: 100%25: two%0Alines%0Ahint: do it\n"
        );
        assert_eq!(annotation("warning", &Error::usage("x"), None), "::warning title=tare::x\n");
        let stdin = Place { name: "<stdin>".into(), text: "x".into(), offset: 0, len: 1, label: String::new() };
        assert_eq!(annotation("error", &Error::usage("x").at(stdin), None), "::error title=tare::x\n");
    }
}
