"""The pages of a report: banner, tables, figures and formats. Nothing here decides."""
