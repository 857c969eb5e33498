"""How results are shown: tables for the terminal and for pages, plots, Gantt charts, HTML pages."""
