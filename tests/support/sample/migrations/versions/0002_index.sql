CREATE INDEX visit_by_who ON sample.visit (who);
