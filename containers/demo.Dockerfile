# The demo and the page: private speech recognition from nothing, then everything that it left in a browser.
#   docker build -f containers/demo.Dockerfile -t confide-demo .
#   docker run --rm -it -p 127.0.0.1:8765:8765 -v confide-runs:/runs confide-demo
# The page's address, with its token, is printed when the demo is done (some minutes). The demo goes on where it was.
FROM python:3.11-slim
WORKDIR /confide
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src src
RUN pip install --no-cache-dir -c constraints.txt --extra-index-url https://download.pytorch.org/whl/cpu torch \
 && pip install --no-cache-dir -c constraints.txt '.[speech,retrieval,figures,export]'
RUN useradd --create-home confide && mkdir /runs && chown confide /runs
USER confide
RUN confide encoder get whisper-tiny.en
VOLUME /runs
EXPOSE 8765
CMD confide demo --out /runs/demo && exec confide ui /runs --host 0.0.0.0 --port 8765 --no-browser
