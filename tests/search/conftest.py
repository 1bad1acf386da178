import sys
from pathlib import Path

# pytest imports test modules one by one (importlib mode): their helpers have to be found.
sys.path.insert(0, str(Path(__file__).parent))
