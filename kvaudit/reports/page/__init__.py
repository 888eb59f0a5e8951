"""The pages of a report: banner, tables, figures and formats. They show what ``reports.verdict`` decided."""
