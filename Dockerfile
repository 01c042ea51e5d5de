# The suite on the image that NVIDIA builds with torch 2.10.0a0, Transformer Engine 2.9, CUDA 13.0 and Python 3.12:
#
#     docker build -t transformer-block .
#     docker run --rm --gpus all --user "$(id -u)" transformer-block python 4_transformer_engine.py
FROM nvcr.io/nvidia/pytorch:25.11-py3

WORKDIR /workspace/transformer-block
COPY requirements.txt .

# The image's torch, triton and Transformer Engine are built for one another: its pip constraints (PIP_CONSTRAINT) stay
# on, torch and triton are left out of what pip resolves, and the build fails where a version has changed all the same.
RUN set -eu; \
    versions() { pip list --format=freeze | grep -iE '^(pytorch[_-])?(torch|triton|transformer[_-]engine[a-z0-9_-]*)=='; }; \
    before="$(versions)"; \
    echo "$before" | grep -iq '^torch=='; \
    echo "$before" | grep -iq '^transformer[_-]engine'; \
    grep -vE '^(torch|triton)\b' requirements.txt > rest.txt; \
    pip install --no-cache-dir -r rest.txt; \
    rm rest.txt; \
    if [ "$before" != "$(versions)" ]; then \
        echo "pip changed what the image holds:"; echo "$before"; echo "became"; versions; exit 1; \
    fi

COPY . .

# For any --user: the folder can be written, and what looks for a home or a user's name finds one.
RUN chmod -R a+rwX .
ENV HOME=/tmp USER=user

CMD ["printf", "%s\\n", \
     "python 0_baseline.py                  one step; also 1_cublas, 2_sdpa, 3_compile, 4_transformer_engine", \
     "python 0_baseline.py --help           its options", \
     "python -m pytest                      the tests", \
     "Start the container with --gpus all; without a GPU the steps run on the CPU."]
