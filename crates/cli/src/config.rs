//! `pointsman config`: the configuration's own documentation.

use std::process::ExitCode;

use crate::output;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// What to print.
    #[arg(value_enum)]
    what: What,
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum What {
    /// The JSON Schema of the file.
    Schema,
    /// The reference page, in Markdown.
    Reference,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    match args.what {
        What::Schema => {
            let schema = serde_json::to_string_pretty(&pointsman_config::schema())?;
            output::result(format_args!("{schema}\n"))?;
        }
        What::Reference => output::result(pointsman_config::reference())?,
    }
    Ok(ExitCode::SUCCESS)
}
