"""Run store and logs of others: files to data frames."""
