//! Keys that are kept out of the configuration: in a variable or in a file that it names.

use super::Resolver;
use crate::settings::Secret;
use crate::tree::Key;

impl Resolver<'_> {
    /// What the named variable or file holds, if one was named: at most one may be. The names of both
    /// keys under `section` come with what was written there. The outer `None` is a problem.
    #[allow(clippy::option_option, reason = "a problem and no key are different things")]
    pub(super) fn secret(
        &mut self,
        (env, variable): (&str, &Option<String>),
        (file, path): (&str, &Option<String>),
        section: &Key,
    ) -> Option<Option<Secret>> {
        let (key, text) = match (variable, path) {
            (None, None) => return Some(None),
            (Some(_), Some(_)) => {
                self.problem(&section.name(file), format!("`{env}` is given too; only one may be"));
                return None;
            }
            (Some(variable), None) => {
                let key = section.name(env);
                if !self.environment.has(variable) {
                    let message = format!("names the variable {variable}, which is not set");
                    self.problem(&key, message);
                    return None;
                }
                let text = self.environment.text(variable, &mut self.problems)?;
                (key, text.to_owned())
            }
            (None, Some(path)) => {
                let key = section.name(file);
                match std::fs::read_to_string(path) {
                    Ok(text) => (key, text),
                    Err(error) => {
                        self.problem(&key, format!("{path:?} cannot be read: {error}"));
                        return None;
                    }
                }
            }
        };
        match Secret::read(&text) {
            Ok(secret) => Some(Some(secret)),
            Err(problem) => {
                self.problem(&key, problem);
                None
            }
        }
    }
}
